"""Models in the style of transformers and torchvision, as their authors write them; sizes are arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotary_table(positions: Tensor, width: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    inverse = 1.0 / base ** (torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = positions.float()[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        repeats = self.heads // self.kv_heads
        wide_k, wide_v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=past is None and t > 1)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, t, -1)), (k, v)


class LlamaMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, width: int = 4096, heads: int = 32, kv_heads: int = 8, hidden: int = 14336) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.self_attn = LlamaAttention(width, heads, kv_heads)
        self.mlp = LlamaMLP(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None):
        mixed, present = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), present


class Llama(nn.Module):
    def __init__(self, vocabulary=128, width=64, heads=4, kv_heads=2, hidden=160, layers=2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.size = width // heads

    def forward(self, ids: Tensor, past: list[tuple[Tensor, Tensor]] | None = None):
        begin = past[0][0].shape[2] if past else 0
        cos, sin = rotary_table(torch.arange(begin, begin + ids.shape[1], device=ids.device), self.size)
        x, presents = self.embed_tokens(ids), []
        for at, layer in enumerate(self.layers):
            x, present = layer(x, cos, sin, past[at] if past else None)
            presents.append(present)
        return self.lm_head(self.norm(x)), presents


class BloomBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
        b, t, w = x.shape
        normed = self.input_layernorm(x)
        fused = self.query_key_value(normed).view(b, t, self.heads, 3, self.size)
        q, k, v = (
            fused[..., 0, :].transpose(1, 2),
            fused[..., 1, :].transpose(1, 2),
            fused[..., 2, :].transpose(1, 2),
        )
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.size) + alibi
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.matmul(weights, v).transpose(1, 2).reshape(b, t, w)
        x = x + self.dense(mixed)
        h = self.dense_h_to_4h(self.post_attention_layernorm(x))
        h = h * 0.5 * (1.0 + torch.tanh(0.79788456 * h * (1 + 0.044715 * h * h)))
        return x + self.dense_4h_to_h(h)


class Bloom(nn.Module):
    def __init__(self, vocabulary=96, width=64, heads=4, layers=2) -> None:
        super().__init__()
        self.heads = heads
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.word_embeddings_layernorm = nn.LayerNorm(width)
        self.h = nn.ModuleList(BloomBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        slopes = torch.pow(2.0, -8.0 * torch.arange(1, self.heads + 1, device=ids.device) / self.heads)
        alibi = slopes[:, None, None] * torch.arange(t, device=ids.device)[None, None, :]
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        x = self.word_embeddings_layernorm(self.word_embeddings(ids))
        alibi = alibi.to(x.dtype)
        for block in self.h:
            x = block(x, alibi, mask)
        return F.linear(self.ln_f(x), self.word_embeddings.weight)


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.intermediate, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + mask
        weights = self.dropout(scores.softmax(dim=-1))
        mixed = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous().flatten(2)
        x = self.norm(self.dropout(self.dense(mixed)) + x)
        return self.output_norm(self.dropout(self.output(F.gelu(self.intermediate(x)))) + x)


class Bert(nn.Module):
    def __init__(self, vocabulary=100, width=64, heads=4, layers=2, positions=64) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position_embeddings, self.token_type_embeddings = (
            nn.Embedding(positions, width),
            nn.Embedding(2, width),
        )
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layer = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.word_embeddings(ids) + self.position_embeddings(positions)
        x = x + self.token_type_embeddings(torch.zeros_like(ids))
        x = self.dropout(self.norm(x))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layer:
            x = layer(x, mask)
        return torch.tanh(self.pooler(x[:, 0]))


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, n, c))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, image=32, patch=8, width=64, heads=4, layers=2, classes=10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(ViTBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None
):
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([] if act is None else [act]))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            conv_bn(inputs, 4 * width, 1, stride) if stride != 1 or inputs != 4 * width else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, blocks=(3, 4, 6, 3), width=64, classes=1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        stages, inputs = [], width
        for at, count in enumerate(blocks):
            for number in range(count):
                stages.append(Bottleneck(inputs, width << at, 2 if at and not number else 1))
                inputs = 4 * (width << at)
        self.layers = nn.Sequential(*stages)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    b, c, h, w = x.size()
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


class ShuffleUnit(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, half = stride, outputs // 2
        self.branch1 = (
            nn.Sequential(conv_bn(inputs, inputs, 3, stride, inputs), conv_bn(inputs, half, 1, act=nn.ReLU()))
            if stride > 1
            else nn.Sequential()
        )
        first = inputs if stride > 1 else half
        self.branch2 = nn.Sequential(
            conv_bn(first, half, 1, act=nn.ReLU()),
            conv_bn(half, half, 3, stride, half),
            conv_bn(half, half, 1, act=nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            a, b = x.chunk(2, dim=1)
            out = torch.cat((a, self.branch2(b)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNet(nn.Module):
    def __init__(self, repeats=(4, 8, 4), widths=(24, 116, 232, 464, 1024), classes=1000) -> None:
        super().__init__()
        self.conv1 = conv_bn(3, widths[0], 3, 2, act=nn.ReLU())
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        units = []
        for inputs, outputs, count in zip(widths, widths[1:], repeats, strict=False):
            units.append(ShuffleUnit(inputs, outputs, 2))
            units += [ShuffleUnit(outputs, outputs, 1) for _ in range(count - 1)]
        self.stages = nn.Sequential(*units)
        self.conv5 = conv_bn(widths[-2], widths[-1], 1, act=nn.ReLU())
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv5(self.stages(self.maxpool(self.conv1(x)))).mean([2, 3]))


class SqueezeExcitation(nn.Module):
    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc2(F.silu(self.fc1(self.avgpool(x))))) * x


class MBConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = inputs * expand
        layers = [conv_bn(inputs, wide, 1, act=nn.SiLU(inplace=True))] if expand != 1 else []
        layers += [conv_bn(wide, wide, kernel, stride, wide, nn.SiLU(inplace=True))]
        layers += [SqueezeExcitation(wide, max(1, inputs // 4)), conv_bn(wide, outputs, 1)]
        self.block = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.residual else self.block(x)


class EfficientNet(nn.Module):
    def __init__(self, stages=None, stem=32, top=1280, classes=1000) -> None:
        super().__init__()
        stages = stages or [
            (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3),
            (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
        ]  # fmt: skip
        blocks, inputs = [conv_bn(3, stem, 3, 2, act=nn.SiLU(inplace=True))], stem
        for expand, kernel, stride, outputs, count in stages:
            for number in range(count):
                blocks.append(MBConv(inputs, outputs, expand, kernel, stride if number == 0 else 1))
                inputs = outputs
        self.features = nn.Sequential(*blocks, conv_bn(inputs, top, 1, act=nn.SiLU(inplace=True)))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(top, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ConvolutionModule(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pointwise1 = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch_norm, self.pointwise2 = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.pointwise1(self.norm(x).transpose(1, 2)), dim=1)
        return self.pointwise2(F.silu(self.batch_norm(self.depthwise(x)))).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, kernel: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = FeedForward(width), FeedForward(width)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.convolution = ConvolutionModule(width, kernel)

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attend(self.attention_norm(x))
        x = x + self.convolution(x)
        return self.norm(x + 0.5 * self.second(x))


class Conformer(nn.Module):
    def __init__(self, features=16, width=32, heads=4, kernel=7, layers=2, tokens=20) -> None:
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()
        )
        self.project = nn.Linear(width * (features // 4), width)
        self.blocks = nn.ModuleList(ConformerBlock(width, heads, kernel) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        x = self.subsample(x[:, None]).transpose(1, 2).flatten(2)
        x = self.project(x)
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(x), dim=-1)


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight is stored as [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.05)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.mlp_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None):
        b, t, c = x.shape
        parts = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in parts)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=-2), torch.cat((past[1], v), dim=-2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        total = k.size(-2)
        allowed = torch.ones(total, total, dtype=torch.bool, device=x.device).tril()[total - t :]
        scores = torch.where(allowed, scores, torch.full([], torch.finfo(scores.dtype).min, device=x.device))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)
        x = x + self.c_proj(mixed)
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), (k, v)


class GPT2(nn.Module):
    def __init__(self, vocabulary=96, width=64, heads=4, layers=2, positions=64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(GPT2Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: Tensor, past: list[tuple[Tensor, Tensor]] | None = None):
        begin = past[0][0].size(-2) if past else 0
        positions = torch.arange(begin, begin + ids.size(-1), device=ids.device)
        x, presents = self.wte(ids) + self.wpe(positions), []
        for at, block in enumerate(self.h):
            x, present = block(x, past[at] if past else None)
            presents.append(present)
        return F.linear(self.ln_f(x), self.wte.weight), presents
