"""What each tenant may use: rates of requests and tokens, and requests in flight, over all routers together."""
