"""What an operator types: the commands of `penstock`."""
