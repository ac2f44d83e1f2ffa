"""Chains on disk (.npz, never pickle)."""


def save_chain(path, grad, jacobians):
    raise NotImplementedError


def load_chain(path):
    raise NotImplementedError
