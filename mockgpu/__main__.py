"""Entry point of `python -m mockgpu`, which is the same as `penstock mock`."""

from mockgpu.cli import main

main()
