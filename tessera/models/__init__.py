"""Networks: one file, one network, its configuration directly above it. They know `nn` and nothing above them."""
