"""A client of the HTTP hub: requests, TLS, the event stream and registry following."""
