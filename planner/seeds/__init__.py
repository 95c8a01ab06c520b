"""The command `penstock seeds`: 119 statements about LLM serving, each with the command that
answers it.
"""
