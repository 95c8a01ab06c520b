"""The links of one agent: dialled, proven, kept alive, lost."""
