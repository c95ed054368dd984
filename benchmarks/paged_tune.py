import itertools, statistics, torch
from cai_kernels.paged_attention import triton as T
dev="cuda"
def graph_time(fn, n=24):
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s): fn(0)
    torch.cuda.current_stream().wait_stream(s)
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n): fn(i)
    g.replay(); torch.cuda.synchronize()
    ts=[]
    for _ in range(5):
        a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)/1e3/n)
    return statistics.median(ts)
N,K,H,B=32,8,128,16
big=torch.empty(2**31,dtype=torch.uint8,device=dev); o=torch.empty_like(big)
print("copy TB/s", 2*2**31/graph_time(lambda i:o.copy_(big),4)/1e12); del big,o
base=T.form_of
for rows,length in ((1,1024),(1,32768),(8,1024),(64,1024),(64,4096),(256,512)):
    per=-(-length//B)+1
    copies=max(1,min(16,int(3e8//(rows*length*K*H*4))+1))
    caches=[(torch.randn(rows*per,B,K,H,device=dev,dtype=torch.bfloat16),torch.randn(rows*per,B,K,H,device=dev,dtype=torch.bfloat16)) for _ in range(copies)]
    most=8192
    tables=torch.zeros(rows,most,dtype=torch.int32,device=dev); tables[:,:per]=torch.randperm(rows*per,device=dev).view(rows,per).int()
    lengths=torch.full((rows,),length,dtype=torch.int32,device=dev)
    q=torch.randn(rows,N,H,device=dev,dtype=torch.bfloat16)
    gb=rows*length*K*H*4/1e12; res=[]
    for keys,warps,stages,progs in itertools.product((64,),(4,8),(2,3),(2,3)):
        if keys*H*4*stages>200000: continue
        T.form_of=lambda d,w: (keys,warps,stages); T.PROGRAMS=progs
        try: t=graph_time(lambda i: T.paged_attention(q,*caches[i%copies],tables,None,lengths,None,H**-0.5,None,None))
        except Exception as e: continue
        res.append((t,keys,warps,stages,progs))
    T.form_of=base; T.PROGRAMS=3
    t0=graph_time(lambda i: T.paged_attention(q,*caches[i%copies],tables,None,lengths,None,H**-0.5,None,None))
    res.sort()
    print(rows,length,f"now {t0*1e6:.1f}us {gb/t0:.2f}TB/s |",' ; '.join(f"{r[1:]} {r[0]*1e6:.1f}us {gb/r[0]:.2f}" for r in res[:6]),flush=True)
