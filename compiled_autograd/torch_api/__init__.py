"""The places of torch that are private, and where its versions differ."""
