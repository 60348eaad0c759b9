"""Policies replayed over recorded sequences of backwards: what each would cost, and what the best plan would."""
