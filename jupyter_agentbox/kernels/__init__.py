"""The kernels: their endpoints and sandboxes, warm starts, and the code that runs in them."""
