"""Wire dialects: event names and shapes of each kind of client, over one session core."""
