"""What layers have in common: their base class, and matrices of one structure."""
