"""Whether two engines can work together over the network between them: tried with other memory."""
