"""A tour of the server with real published weights; the server itself never imports this."""
