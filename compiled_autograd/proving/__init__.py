"""Proofs of compiled forms: before a form is trusted, its results are compared with those of the real calls."""
