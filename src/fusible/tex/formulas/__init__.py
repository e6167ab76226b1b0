"""What the backends of torch's and of lazy tensors compute alike, written once.

A formula asks a framework for its array functions (``Arrays``), and a backend for how operands come and results go (``ArrayKernels``). The eager
reference and a compiled program are then the same steps by construction; a backend overrides one where its framework has a single kernel for it.
"""
