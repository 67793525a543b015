"""What all Triton kernels share: how they are started, and the row that a program works on."""
