"""What the service does with its database: index, leases, builds, tokens, usage."""
