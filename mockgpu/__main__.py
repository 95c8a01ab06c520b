"""Run `python -m mockgpu`, the same as `penstock mock`."""

from mockgpu.cli import main

main()
