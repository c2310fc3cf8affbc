"""The methods without a server in fairseq: Adasum and AdaScale, and the trainer that both need."""
