"""The command line: the commands of `penstock`, such as `penstock serve`."""
