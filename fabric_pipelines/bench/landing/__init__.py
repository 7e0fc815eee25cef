"""What landing costs: our writer beside other ways into Postgres, the prices of indexes, the governor under load."""
