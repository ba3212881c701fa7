import json, sys, torch, contrastile, time
from contrastile import retrieval
import torch.nn.functional as F
torch.manual_seed(0)
def med(f, n=5):
    for _ in range(2): f()
    torch.cuda.synchronize(); ts=[]
    for _ in range(n):
        t=time.perf_counter(); f(); torch.cuda.synchronize(); ts.append((time.perf_counter()-t)*1e3)
    return round(sorted(ts)[n//2],2)
out={"device":torch.cuda.get_device_name()}
for b in (131072,262144):
    i=F.normalize(torch.randn(b,512,device='cuda'),dim=1).bfloat16(); t=F.normalize(F.normalize(torch.randn(b,512,device='cuda'),dim=1)+.5*i.float(),dim=1).bfloat16()
    def fwd():
        with torch.no_grad(): contrastile.clip_loss(i,t,100.)
    def chunks():
        r=[]
        own=(i.float()*t.float()).sum(1)
        for a in range(0,b,4096):
            x=i[a:a+4096]@t.T; r.append((x>own[a:a+4096,None]).sum(1))
        return torch.cat(r)
    rows={"forward":med(fwd),"ranks":med(lambda: retrieval.ranks(i,t)),"plain chunks":med(chunks)}
    if b==131072:
        rows["top 100"]=med(lambda: retrieval.top_k(i,t,100),3)
        rows["plain chunks of mm and topk"]=med(lambda: [ (i[a:a+4096]@t.T).topk(100,dim=1) for a in range(0,b,4096)],3)
    out[f"b={b}"]=rows; print(rows,flush=True)
json.dump(out,open(sys.argv[1],'w'))
