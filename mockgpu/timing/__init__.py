"""How long an engine step takes: roofline model, parallel layouts, measurements, decode runs."""
