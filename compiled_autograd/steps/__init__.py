"""What a tape graph is run by: regions, users' code and leaves in their order, and the slots between them."""
