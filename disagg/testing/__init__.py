"""What tests others: the conformance kit's checks of transfers, and the referee of real servers."""
