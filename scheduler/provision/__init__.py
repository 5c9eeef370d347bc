"""Making the places where a cluster's processes run, and starting and stopping them."""
