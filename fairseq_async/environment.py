"""Names of the environment variables by which the processes of a run find each other, or that users may set."""

WORKER = "FAIRSEQ_ASYNC_WORKER"  # id of this worker, or JOINS
WORKERS = "FAIRSEQ_ASYNC_WORKERS"  # number of workers that were announced
RANKS = "FAIRSEQ_ASYNC_RANKS"  # numbers of ranks of all workers, as in 2,1; of a worker that joins, its own number
SERVER = "FAIRSEQ_ASYNC_SERVER"  # HOST:PORT of a server that is running already
TOKEN = "FAIRSEQ_ASYNC_TOKEN"  # the run's secret: other users cannot read the environment, unlike a command line
TLS = "FAIRSEQ_ASYNC_TLS"  # directory with the run's certificates
MEETING = "FAIRSEQ_ASYNC_MEETING"  # name of the job whose workers find the server by a file in the run's directory
HOST = "FAIRSEQ_ASYNC_HOST"  # address at which such workers reach this machine; loopback where all are on it
RENDEZVOUS = "FAIRSEQ_ASYNC_RENDEZVOUS"  # directory in which worker 0 of a script asks its launcher for a server
SLOWDOWN = "FAIRSEQ_ASYNC_SLOWDOWN"  # makes workers slower, for experiments
PLUGINS = "FAIRSEQ_ASYNC_PLUGINS"  # modules or .py files that register rules, with commas between them
JOINS = "joins"  # value of WORKER for a worker that nobody announced
