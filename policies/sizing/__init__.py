"""Sizing: model shapes, GPUs, the memory check, layout rules, costs. Pure, for every command."""
