import json, sys, time, torch, contrastile
from contrastile import retrieval
import torch.nn.functional as F
torch.manual_seed(0)
def med(f, n=9):
    for _ in range(4): f()
    torch.cuda.synchronize(); ts=[]
    for _ in range(n):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True); a.record(); f(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[n//2]
out={"device":torch.cuda.get_device_name()}
for b in (4096,32768):
    d=512
    i=F.normalize(torch.randn(b,d,device='cuda'),dim=1).bfloat16().requires_grad_()
    t=F.normalize(F.normalize(torch.randn(b,d,device='cuda'),dim=1)+.5*i.detach().float(),dim=1).bfloat16().requires_grad_()
    s=torch.tensor(100.,device='cuda',requires_grad=True)
    def step(**k):
        l=contrastile.clip_loss(i,t,s,**k); l.backward(); i.grad=t.grad=s.grad=None
    rows={}
    for name,k in {"auto":{}, "auto, threshold":{"threshold":.1}, "triton":{"backend":"triton"}, "triton, threshold":{"backend":"triton","threshold":.1}, "triton, threshold -.2":{"backend":"triton","threshold":-.2}}.items():
        rows[name]=round(med(lambda: step(**k)),3)
    def plain():
        x=s*(i@t.T); e=torch.eye(b,device='cuda',dtype=torch.bool); lim=(x.diagonal()+s*.1).detach()
        r=x.masked_fill((x>lim[:,None])&~e,-torch.inf); c=x.masked_fill((x>lim)&~e,-torch.inf)
        lab=torch.arange(b,device='cuda'); l=(F.cross_entropy(r,lab)+F.cross_entropy(c.T,lab))/2
        l.backward(); i.grad=t.grad=s.grad=None
    try: rows["plain, threshold"]=round(med(plain),3)
    except torch.OutOfMemoryError: rows["plain, threshold"]="out of memory"
    out[f"b={b}"]=rows; print(rows,flush=True); torch.cuda.empty_cache()
# right: gradients against float64 full matrices
b=2048
i=F.normalize(torch.randn(b,256,device='cuda'),dim=1); t=F.normalize(F.normalize(torch.randn(b,256,device='cuda'),dim=1)+.5*i,dim=1)
for dt in (torch.bfloat16,torch.float16,torch.float32):
  for th in (.1,-.25):
    res=[]
    for be,dd in (("ref",torch.float64),("triton",dt)):
        a,c=i.to(dt).to(dd).requires_grad_(),t.to(dt).to(dd).requires_grad_(); s=torch.tensor(50.,device='cuda',dtype=torch.float64 if be=="ref" else torch.float32,requires_grad=True)
        if be=="ref":
            x=s*a@c.T; e=torch.eye(b,device='cuda',dtype=torch.bool); lim=(x.diagonal()+s*th).detach()
            r=x.masked_fill((x>lim[:,None])&~e,-torch.inf); q=x.masked_fill((x>lim)&~e,-torch.inf)
            l=((torch.logsumexp(r,1)-x.diagonal()).mean()+(torch.logsumexp(q,0)-x.diagonal()).mean())/2
        else: l=contrastile.clip_loss(a,c,s,threshold=th,backend=be)
        l.backward(); res.append((l,a.grad,c.grad,s.grad))
    e=[f"{float((x.double()-y.double()).norm()/x.double().norm()):.1e}" for x,y in zip(*res)]
    out[f"error {dt} {th}"]=e; print(dt,th,e,flush=True)
json.dump(out,open(sys.argv[1],'w'))
