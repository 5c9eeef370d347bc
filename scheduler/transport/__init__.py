"""How the controller reaches its nodes."""
