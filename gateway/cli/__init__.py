"""The command line: the commands of `penstock`."""
