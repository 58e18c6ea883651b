"""The HTTP door: contracts, feeds, routes for pumps, and the other routes that are no operation."""
