"""What can only be known on a GPU, in one script: `python -m tools.gpu_check`."""
