"""What decides how large models are served on 1 to 512 GPUs, by arithmetic: see benchmarks/SCALE.md."""
