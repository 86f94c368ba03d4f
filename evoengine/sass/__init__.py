"""Machine code: read a kernel's SASS, execute it, time one SM by it, and predict the kernel's time on a chip."""
