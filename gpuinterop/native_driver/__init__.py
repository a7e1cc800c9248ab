"""The one implementation for drivers such as CUDA's and HIP's, over a table of what differs between them.

Both drivers are C libraries with the same functions under another prefix, the same structs and, mostly, the same
numbers. The modules here have the body: they call the driver's C functions through ctypes, by names without the prefix.
A vendor's package gives a `Table`, a `NativeDriver` that loads the library, and the parts of the contract that differ.

A backend may use this package, and need not: the contract is `gpuinterop.backend`.
"""
