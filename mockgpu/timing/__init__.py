"""The durations of engine steps: roofline, parallel layouts, measured grids, decode runs."""
