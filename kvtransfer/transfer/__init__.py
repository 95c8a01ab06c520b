"""What happens in a KV transfer, without I/O: offers of the sender, fetches of the receiver."""
