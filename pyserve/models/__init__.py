"""Models: what a file or folder says it is, its weights in the kernels' layout, and its step as a program."""
