
ws
/device:GPU:0
Stream #15(MemcpyD2H)
Stream #14(MemcpyH2D)"
Stream #13(Compute,Memset)"Š	MemcpyH2DHèù³Û9P€Æ<ZL
memcpy_details:kind_src:pageable kind_dst:device size:2048 dest:0 async:1Z!
tf_opIteratorGetNext/_3:_Send"Ð	MemcpyH2DH°ÙÌ•@P ÎIZM
memcpy_details;kind_src:pinned kind_dst:device size:8388608 dest:0 async:1Ze
tf_op\StatefulPartitionedCall/functional_1/conv2d_1/convolution/lms/0/swap_in_0:_CopyFromHostToGpu"‹	MemcpyH2DH¨à™¸„P€Ò8ZL
memcpy_details:kind_src:pageable kind_dst:device size:2048 dest:0 async:1Z!
tf_opIteratorGetNext/_3:_Send"Ñ	MemcpyH2DHÐ›™ö‡P¸™ÈIZM
memcpy_details;kind_src:pinned kind_dst:device size:8388608 dest:0 async:1Ze
tf_op\StatefulPartitionedCall/functional_1/conv2d_1/convolution/lms/0/swap_in_0:_CopyFromHostToGpu"—<void tensorflow::functor::ShuffleInTensor3Simple<float, 2, 1HøÚÆ¹=P€ŠPZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"˜<void cudnn::engines_precompiled::nchwToNhwcKernel<float, floHèíÐš>P€ôñZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"—<void cudnn::engines_precompiled::nchwToNhwcKernel<float, floHÐÏƒª>P˜Ø]ZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"˜<void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_oHÐ£»¸>Pè‘šZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"˜<void cudnn::engines_precompiled::nhwcToNchwKernel<float, floH¸û‘Ë>PèãùZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"¤<void cub::CUB_200805_SM___CUDA_ARCH_LIST__::DeviceSegmentedRHˆ±·ò>P ážBZU
tf_opLStatefulPartitionedCall/functional_1/batch_normalization_1/moments/mean:Mean"Š Mul_GPU_DT_FLOAT_DT_FLOAT_kernelHØ»º±AP€Ð€ZW
tf_opNStatefulPartitionedCall/functional_1/batch_normalization_1/batchnorm/mul_1:Mul"™<void tensorflow::functor::ShuffleInTensor3Simple<float, 2, 1HàœðˆBP€°mZK
tf_opBStatefulPartitionedCall/functional_1/conv2d_1_2/convolution:Conv2D"š<void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3,H°†Ã·BPÐ½çZK
tf_opBStatefulPartitionedCall/functional_1/conv2d_1_2/convolution:Conv2D"_main_kernelH ¬ãÎEPèûýZA
tf_op8StatefulPartitionedCall/functional_1/re_lu_1_2/Relu:Relu"˜<void tensorflow::functor::ShuffleInTensor3Simple<float, 2, 1HèžÒÌ…P€ŠPZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"™<void cudnn::engines_precompiled::nchwToNhwcKernel<float, floHˆ‚¸…†P€ÐýZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"˜<void cudnn::engines_precompiled::nchwToNhwcKernel<float, floHˆ¶Ü†P€ìYZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"™<void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_oHð­êš†Pè—˜ZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"™<void cudnn::engines_precompiled::nhwcToNchwKernel<float, floHØçÊ­†P€ÜùZI
tf_op@StatefulPartitionedCall/functional_1/conv2d_1/convolution:Conv2D"¥<void cub::CUB_200805_SM___CUDA_ARCH_LIST__::DeviceSegmentedRH¨¨Ò†P¸Ó BZU
tf_opLStatefulPartitionedCall/functional_1/batch_normalization_1/moments/mean:Mean"‹ Mul_GPU_DT_FLOAT_DT_FLOAT_kernelHÚËŒ‰P€Ä„ZW
tf_opNStatefulPartitionedCall/functional_1/batch_normalization_1/batchnorm/mul_1:Mul"š<void tensorflow::functor::ShuffleInTensor3Simple<float, 2, 1HÈéØÎ‰P€¶kZK
tf_opBStatefulPartitionedCall/functional_1/conv2d_1_2/convolution:Conv2D"›<void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3,H˜Õàù‰P¸­ïZK
tf_opBStatefulPartitionedCall/functional_1/conv2d_1_2/convolution:Conv2D"`main_kernelHØ¼Ø¦P€îÿZA
tf_op8StatefulPartitionedCall/functional_1/re_lu_1_2/Relu:Relu