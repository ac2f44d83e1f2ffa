"""Parameters of layers and cells: arrays that a caller may share, masks, and fixed arguments."""
