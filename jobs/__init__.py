"""Job scripts and programs to run or to copy."""
