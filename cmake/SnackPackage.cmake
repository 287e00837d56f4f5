# snack::snack, the whole C++ package in one target, and what `cmake --install` puts down for find_package and pkg-config.
add_library(snack INTERFACE)
target_link_libraries(snack INTERFACE snack_defaults snack_cpu snack_reference snack_cuda snack_core)
set(SNACK_HAS_CUDA_BIT 0)
if(SNACK_HAS_CUDA)
  set(SNACK_HAS_CUDA_BIT 1)
endif()
target_compile_definitions(snack INTERFACE SNACK_HAS_CUDA=${SNACK_HAS_CUDA_BIT})
set(SNACK_PACKAGE_TARGETS snack snack_core snack_reference snack_cpu snack_defaults snack_cuda)
foreach(target ${SNACK_PACKAGE_TARGETS})
  string(REPLACE "snack_" "" short ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${short})
  add_library(snack::${short} ALIAS ${target})
endforeach()

if(NOT SNACK_INSTALL)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(SNACK_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/snack")

install(TARGETS ${SNACK_PACKAGE_TARGETS} EXPORT snackTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT snack_cpp
  INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(DIRECTORY include/snack DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT snack_cpp)
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/snack" COMPONENT snack_cpp)
install(EXPORT snackTargets NAMESPACE snack:: DESTINATION "${SNACK_CMAKE_DIR}" COMPONENT snack_cpp)

configure_package_config_file(cmake/snackConfig.cmake.in "${PROJECT_BINARY_DIR}/snackConfig.cmake"
  INSTALL_DESTINATION "${SNACK_CMAKE_DIR}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/snackConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/snackConfig.cmake" "${PROJECT_BINARY_DIR}/snackConfigVersion.cmake"
  DESTINATION "${SNACK_CMAKE_DIR}" COMPONENT snack_cpp)

# The prefix is found from where the file stands, so that an installation can be moved.
file(RELATIVE_PATH SNACK_PC_PREFIX "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
string(REGEX REPLACE "/$" "" SNACK_PC_PREFIX "${SNACK_PC_PREFIX}")
set(SNACK_PC_CUDA "")
if(SNACK_HAS_CUDA)
  get_filename_component(directory "${CUDA_cudart_static_LIBRARY}" DIRECTORY)
  set(SNACK_PC_CUDA " -L${directory} -lcudart_static -ldl -lrt")
endif()
configure_file(cmake/snack.pc.in "${PROJECT_BINARY_DIR}/snack.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/snack.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT snack_cpp)
