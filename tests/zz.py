import torch
from common.models import build_model
from common.sync import build_sync
from tests.helpers import run_ranks
def f(rank):
    torch.manual_seed(0)
    sync, model = build_sync("ddp"), build_model("vgg11", 10)
    w=sync.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3): w(torch.randn(2, 3, 32, 32)).sum().backward()
    return {k:str(v) for k,v in w._get_ddp_logging_data().items()}
def main():
    print(run_ranks(2,f)[0])
if __name__=="__main__": main()
