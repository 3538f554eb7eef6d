; Instructions that take vectors of bfloat16, as functions of words: TVM has no values of such types.
; `ladder.lower.rocm.worker` links what a kernel calls into it.
target triple = "amdgcn-amd-amdhsa-hcc"

declare float @llvm.amdgcn.fdot2.f32.bf16(<2 x bfloat>, <2 x bfloat>, float, i1 immarg)
declare <4 x float> @llvm.amdgcn.mfma.f32.16x16x32.bf16(<8 x bfloat>, <8 x bfloat>, <4 x float>, i32 immarg, i32 immarg, i32 immarg)

define linkonce_odr hidden float @ladder_dot2_f32_bf16(i32 %a, i32 %b, float %c) #0 {
  %x = bitcast i32 %a to <2 x bfloat>
  %y = bitcast i32 %b to <2 x bfloat>
  %sum = call float @llvm.amdgcn.fdot2.f32.bf16(<2 x bfloat> %x, <2 x bfloat> %y, float %c, i1 false)
  ret float %sum
}

define linkonce_odr hidden <4 x float> @ladder_mfma_f32_16x16x32_bf16(<4 x i32> %a, <4 x i32> %b, <4 x float> %c) #1 {
  %x = bitcast <4 x i32> %a to <8 x bfloat>
  %y = bitcast <4 x i32> %b to <8 x bfloat>
  %sums = call <4 x float> @llvm.amdgcn.mfma.f32.16x16x32.bf16(<8 x bfloat> %x, <8 x bfloat> %y, <4 x float> %c, i32 0, i32 0, i32 0)
  ret <4 x float> %sums
}

attributes #0 = { alwaysinline nounwind memory(none) }
attributes #1 = { alwaysinline convergent nounwind memory(none) }
