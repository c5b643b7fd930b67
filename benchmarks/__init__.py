"""The scoreboard: Holdfast beside torch and safetensors, as ratios. `python -m benchmarks`; see docs/benchmarks.md."""
