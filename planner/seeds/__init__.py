"""The command `penstock seeds`: 119 statements about LLM serving, each with a command to test
it.
"""
