"""Machine code: reads a kernel's SASS, executes it, times one SM by it, and predicts the kernel's time on a chip."""
