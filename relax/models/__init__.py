"""Models on disk and in torch: loading a thinker, prompts as tensors, weight snapshots, a tiny model."""
