"""The Python that Inductor generates around its CPU kernels, as a list of instructions that a piece of C++ runs."""
