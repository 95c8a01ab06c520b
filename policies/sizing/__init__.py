"""Sizes deployments: model shapes, GPUs, the memory check, layout rules and costs, without I/O."""
