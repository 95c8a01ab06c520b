"""The two ends of a transfer: offers at the source, reservations at the sink. Sans-IO."""
