"""What Inductor compiles wrongly (2.13), and how it is kept from it. Each has a test that tells when it can go."""
